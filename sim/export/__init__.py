"""What a reader opens: the HTML page and its figures, the Perfetto trace, files that appear whole."""
