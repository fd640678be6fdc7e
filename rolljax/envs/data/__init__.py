"""Data of one's own: files of rows, the columns that matter, and what stands in them."""
