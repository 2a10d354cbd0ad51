"""What is observed? Errors of a model on a user's data with intervals, and which layer is to blame for them."""

from softequiv.measure.attribution import Attribution, Part, attribute
from softequiv.measure.jacobian import jacobian_norm, jacobian_square
from softequiv.measure.measurement import Measurement, Row, measure

__all__ = ["Attribution", "Measurement", "Part", "Row", "attribute", "jacobian_norm", "jacobian_square", "measure"]
