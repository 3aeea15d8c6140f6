"""``python -m ingot`` is ``ingot``."""

from ingot.cli.start import start

if __name__ == "__main__":
    start()
