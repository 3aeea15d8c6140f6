"""``python -m ingot`` is ``ingot``."""

from ingot.cli.main import app

if __name__ == "__main__":
    app(prog_name="ingot")
