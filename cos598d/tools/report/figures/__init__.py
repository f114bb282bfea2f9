"""The page's plots: one function a figure, each returning SVG, or None where the records have nothing to plot."""
