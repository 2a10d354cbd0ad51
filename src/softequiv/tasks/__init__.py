"""What are data, model, loss and metric of a problem? So far: folders of pictures."""

from softequiv.tasks.images import Images, open_images

__all__ = ["Images", "open_images"]
