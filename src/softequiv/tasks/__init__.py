"""Which problem is it? Data, loss and figures of merit: classification, segmentation, trajectories, regression."""

from softequiv.tasks.base import Examples, Held, Task
from softequiv.tasks.cifar import cifar10, cifar100
from softequiv.tasks.classification import Classification
from softequiv.tasks.disc import InDisc
from softequiv.tasks.folders import image_folder
from softequiv.tasks.hub import hub_classification
from softequiv.tasks.images import Images, open_images
from softequiv.tasks.masks import ade20k, camvid, mask_folders, voc
from softequiv.tasks.mnist import mnist
from softequiv.tasks.regression import Regression, inertia, matrix_element, synthetic_o5
from softequiv.tasks.segmentation import Segmentation
from softequiv.tasks.splits import few
from softequiv.tasks.trajectories import Trajectories, read_scene

__all__ = [
    "Classification",
    "Examples",
    "Held",
    "Images",
    "InDisc",
    "Regression",
    "Segmentation",
    "Task",
    "Trajectories",
    "ade20k",
    "camvid",
    "cifar10",
    "cifar100",
    "few",
    "hub_classification",
    "image_folder",
    "inertia",
    "mask_folders",
    "matrix_element",
    "mnist",
    "open_images",
    "read_scene",
    "synthetic_o5",
    "voc",
]
