"""The pocket picture model: drawn scenes, talk about them, a small MiniGPT-4, its training and export."""
