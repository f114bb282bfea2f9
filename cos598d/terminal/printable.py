"""Text from outside, made safe for a terminal, a log or a page: unprintable characters become escapes."""

LONGEST = 2000
LONGEST_WORD = 30  # characters; the text is cut between words, unless they are longer


def printable(text: object, longest: int = LONGEST, keep: str = "") -> str:
    r"""`text` as one line that a terminal shows but never obeys: "\x1b[31m" becomes the eight letters `\x1b[31m`.

    All characters that Unicode calls unprintable are escaped, except those in `keep`. These are control characters (a
    terminal obeys them) and format characters (those of direction make "cod.exe" look like "exe.doc"). They are also
    lone surrogates (which no encoding can write), separators other than the space, and private and unassigned code
    points. Letters of every script stay. The middle of a text longer than `longest` characters is replaced, at word
    boundaries, by a note.
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
