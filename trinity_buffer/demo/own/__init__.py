"""What `trinity-buffer init` writes, and `demo --model hf` practises."""
