"""Snapshots for the dashboard, read from the server's folds while a page is open."""
