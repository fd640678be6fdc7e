"""Custom data: files of rows, the columns that matter, and their contents."""
