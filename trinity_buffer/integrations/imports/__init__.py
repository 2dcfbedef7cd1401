"""What other packages left in files, as experiences: a short module for each format."""
