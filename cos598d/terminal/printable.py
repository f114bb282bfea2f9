"""Text from outside, made fit for a terminal, a log or a page: what does not show as itself is written as an escape."""

LONGEST = 2000


def printable(text: object, longest: int = LONGEST, keep: str = "") -> str:
    r"""`text` as one line that does nothing but show: "\x1b[31m" as the nine letters `\x1b[31m`.

    Escaped are control characters (a terminal obeys them), format characters (those of direction make "cod.exe" look
    like "exe.doc"), lone surrogates (which no encoding can write), separators but the space, private and unassigned
    code points: all that Unicode calls unprintable, but for the characters in `keep`. Letters of every script stay.
    Of a text longer than `longest` characters the middle is left out, and said so.
    """
    text = str(text)
    if len(text) > longest:
        half = longest // 2
        text = f"{text[:half]} [{len(text) - 2 * half} characters left out] {text[len(text) - half :]}"
    return "".join(c if c.isprintable() or c in keep else _escaped(c) for c in text)


def _escaped(character: str) -> str:
    code = ord(character)
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
