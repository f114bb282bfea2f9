"""From gradients that are not the mean to the probable reason, and to where they are wrong."""

from cos598d.tools.check.diagnosis.find import symptom_of
from cos598d.tools.check.diagnosis.symptom import UNKNOWN, Symptom, sentence

__all__ = ["UNKNOWN", "Symptom", "sentence", "symptom_of"]
