"""The pages in the browser: the dashboard's files and its live stream. Sources of the files are in ``tools/web``."""
