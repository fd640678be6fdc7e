"""Programs that are handed into sandboxes as text. Standard library only; they import each other as plain modules."""
