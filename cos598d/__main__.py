"""`cos598d`."""

from typing import NoReturn

from cos598d.commands.start import start


def main() -> NoReturn:
    """The program `cos598d`."""
    start(_program)


def _program() -> int:
    from cos598d.commands import cli  # here, so that a Ctrl-C during imports is one sentence too

    return cli.main()


if __name__ == "__main__":
    main()
