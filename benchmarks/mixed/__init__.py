"""Mixed second derivatives through a deep frozen generator (`task`): `times`, and peak `memory`."""
