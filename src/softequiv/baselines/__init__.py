"""What would people use instead? Each alternative in one file, as good as its authors meant it."""

from softequiv.baselines.augmentation import Augmented
from softequiv.baselines.autoregressive import Autoregressive, ConstantVelocity
from softequiv.baselines.blurpool import BlurGain, BlurPool2d, MaxBlurPool2d, blurred_kernel
from softequiv.baselines.canonical import Canonical, Energies, Orientation, WithPrior, prior_loss
from softequiv.baselines.emlp import EMLP, EMLPRPP, MLP
from softequiv.baselines.eqauto import EqAuto
from softequiv.baselines.group_cnn import CentredHalving, GroupCNN, GroupConv2d, LiftingConv2d, free_parameters
from softequiv.baselines.paper import paper_gain, paper_linear, paper_soften
from softequiv.baselines.penalty import Penalised
from softequiv.baselines.relaxed import (
    RelaxedConv2d,
    RelaxedGroupCNN,
    RelaxedGroupConv2d,
    RelaxedLiftingConv2d,
    weight_sharing_penalty,
)
from softequiv.baselines.rpp import RPPConv2d, RPPLinear, merged, rpp, set_mix
from softequiv.baselines.vector_neurons import VNAttention, VNInvariant, VNLinear, VNNorm, VNReLU

__all__ = [
    "EMLP",
    "EMLPRPP",
    "MLP",
    "Augmented",
    "Autoregressive",
    "BlurGain",
    "BlurPool2d",
    "Canonical",
    "CentredHalving",
    "ConstantVelocity",
    "Energies",
    "EqAuto",
    "GroupCNN",
    "GroupConv2d",
    "LiftingConv2d",
    "MaxBlurPool2d",
    "Orientation",
    "Penalised",
    "RPPConv2d",
    "RPPLinear",
    "RelaxedConv2d",
    "RelaxedGroupCNN",
    "RelaxedGroupConv2d",
    "RelaxedLiftingConv2d",
    "VNAttention",
    "VNInvariant",
    "VNLinear",
    "VNNorm",
    "VNReLU",
    "WithPrior",
    "blurred_kernel",
    "free_parameters",
    "merged",
    "paper_gain",
    "paper_linear",
    "paper_soften",
    "prior_loss",
    "rpp",
    "set_mix",
    "weight_sharing_penalty",
]
