"""``python -m trinity_buffer`` is ``trinity-buffer``."""

from trinity_buffer.cli.main import main

if __name__ == "__main__":
    main()
