"""Networks of other libraries, with random weights and in small configurations, that etfarm and plain ExecuTorch lower alike.

Each module has one function for each network, which imports its library when it is called. torchvision, timm and transformers
are the extra `zoo`; the examples of ExecuTorch need nothing else.
"""
