"""Tests of the trainer and of the stream that feeds it."""
