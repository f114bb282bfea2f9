"""Text from outside, made fit for a terminal, a log or a page: what does not show as itself is written as an escape."""

LONGEST = 2000
LONGEST_WORD = 30  # characters; a cut falls between words, unless they are longer


def printable(text: object, longest: int = LONGEST, keep: str = "") -> str:
    r"""`text` as one line that a terminal shows and never obeys: "\x1b[31m" becomes the eight letters `\x1b[31m`.

    Escaped are control characters (a terminal obeys them), format characters (those of direction make "cod.exe" look
    like "exe.doc"), lone surrogates (which no encoding can write), separators other than the space, and private and
    unassigned code points: all that Unicode calls unprintable, except the characters in `keep`. Letters of every script
    stay. The middle of a text longer than `longest` characters is left out, at words, with a note that says so.
    """
    text = str(text)
    if len(text) > longest:
        head, tail = text[: longest // 2], text[len(text) - longest // 2 :]
        if " " in head[-LONGEST_WORD:]:
            head = head.rpartition(" ")[0]
        if " " in tail[:LONGEST_WORD]:
            tail = tail.partition(" ")[2]
        text = f"{head} [{len(text) - len(head) - len(tail)} characters left out] {tail}"
    return "".join(c if c.isprintable() or c in keep else _escaped(c) for c in text)


def _escaped(character: str) -> str:
    code = ord(character)
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
