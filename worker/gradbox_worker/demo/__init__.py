"""`gradbox demo`: the main job on real text and a real model, checked against naive code."""
