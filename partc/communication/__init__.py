"""Communication around regions: parameters gathered, gradients scattered and summed, values sent."""
