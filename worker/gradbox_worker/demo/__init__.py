"""`gradbox demo`: the main job on real text and a real pretrained model, checked against naive code."""
