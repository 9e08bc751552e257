"""How fast groups and ranks are, and which of them stand out."""
