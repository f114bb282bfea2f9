"""How the book is made of the documents; `scripts/make_book.py` builds it."""
