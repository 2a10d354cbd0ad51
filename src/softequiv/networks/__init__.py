"""What can be built of typed features? Networks from scratch whose softness is the dial of the whole: CNNs and
transformers.
"""

from softequiv.networks.forecaster import Forecaster
from softequiv.networks.steerable import steerable_cnn
from softequiv.networks.vision import VisionTransformer

__all__ = ["Forecaster", "VisionTransformer", "steerable_cnn"]
