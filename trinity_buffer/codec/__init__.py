"""Bytes of segments and of events, and back. NumPy and msgpack alone: torch is never imported.

Whatever the bytes are, only `CodecError` escapes from reading them, and what they claim is checked
against what is there before anything is allocated.
"""
