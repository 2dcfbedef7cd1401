"""The recorder: a proxy before an inference server that stores every conversation."""
