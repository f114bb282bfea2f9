"""How the book is made of the documents; `tools/make_book.py` builds it."""
