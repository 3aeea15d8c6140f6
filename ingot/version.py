"""The version of Ingot, which every engine records."""

VERSION = "0.1.0"
