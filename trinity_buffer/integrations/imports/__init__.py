"""What other packages left in files, as experiences."""
