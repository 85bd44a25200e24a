"""``python -m pagetile``: what this build contains and what it finds on this machine."""

from pagetile.config import show_config

show_config()
