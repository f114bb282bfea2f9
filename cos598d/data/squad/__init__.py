"""SQuAD: its files, windows over long contexts, predictions cut from the text, the official scores."""
