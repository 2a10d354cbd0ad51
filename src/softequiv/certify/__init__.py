"""What is guaranteed? Certificates of weights, and of networks where the constants of all their layers are known."""

from softequiv.certify.certificate import Certificate, Verification, certify
from softequiv.certify.modelled import ActionGap
from softequiv.certify.network import NetworkCertificate, certify_network
from softequiv.certify.weight import WeightCertificate

__all__ = [
    "ActionGap",
    "Certificate",
    "NetworkCertificate",
    "Verification",
    "WeightCertificate",
    "certify",
    "certify_network",
]
