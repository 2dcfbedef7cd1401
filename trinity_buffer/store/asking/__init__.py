"""What is asked of a store besides the daily work: then and now, counted, by columns."""
