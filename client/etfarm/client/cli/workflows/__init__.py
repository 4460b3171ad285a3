"""What commands do with a farm: run one job from its submission to its result, or a data set through sessions."""
