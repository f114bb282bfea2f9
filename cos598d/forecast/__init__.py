"""What a run will come to, by formula and by the model of cost, before any rank of it is started."""

from cos598d.forecast.facts import Forecast
from cos598d.forecast.forecast import forecast
from cos598d.forecast.known import Known

__all__ = ["Forecast", "Known", "forecast"]
