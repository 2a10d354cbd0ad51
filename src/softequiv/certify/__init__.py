"""What is guaranteed? Certificates of weights, of networks whose constants are all known, of any model on average over
data, and of smoothed models sample by sample.
"""

from softequiv.certify.certificate import Certificate, Verification
from softequiv.certify.front import certify
from softequiv.certify.modelled import ActionGap
from softequiv.certify.network import NetworkCertificate, certify_network
from softequiv.certify.smoothing import Smoothed, SmoothedCertificate, certified_radius, certify_smoothed
from softequiv.certify.statistical import BoundedFigure, StatisticalCertificate
from softequiv.certify.weight import WeightCertificate

__all__ = [
    "ActionGap",
    "BoundedFigure",
    "Certificate",
    "NetworkCertificate",
    "Smoothed",
    "SmoothedCertificate",
    "StatisticalCertificate",
    "Verification",
    "WeightCertificate",
    "certified_radius",
    "certify",
    "certify_network",
    "certify_smoothed",
]
