"""cos598d: learn, teach and measure data-parallel training by fine-tuning BERT."""

__version__ = "0.1.0"
