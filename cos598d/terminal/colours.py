"""The colours of every figure: Okabe and Ito's, which colour-blind readers can distinguish."""

BLUE, VERMILLION, GREEN, PURPLE, BLACK, ORANGE, SKY, YELLOW = (
    *("#0072B2", "#D55E00", "#009E73", "#CC79A7"),
    *("#000000", "#E69F00", "#56B4E9", "#F0E442"),
)
# Of the series of a figure, in this order. Yellow is too pale for a line.
SERIES = (BLUE, VERMILLION, GREEN, PURPLE, BLACK, ORANGE, SKY)
GREY = "#999999"
