package volume

// Parts of error texts that name the orchestrator's objects. They stand here because the
// packages of the core know of no orchestrator; only the people who read the errors do.
const (
	TextRoot   = "kubelet root"
	TextWait   = "wait until the other pod is gone"
	TextDelete = "delete its pod"
	TextEndVM  = "if that is the VM of a pod that has gone, end the VM (`crustctl end`; never only its shim), and repeat"
	// TextStopSandbox is for a sandbox that does not end by itself.
	TextStopSandbox = "if nothing ends it, `crictl stopp` it, or end its VM (never only its shim)"
	TextPodGroup    = "its control group is that of a sandbox of the volume's pod"
	TextNeedsHost   = "its pod needs hostPID: true"
	// TextNotice is the text of a guard's only file, for a person.
	TextNotice = "This directory stands in for a volume whose filesystem is mounted inside the\n" +
		"pod's sandbox, by crust-proxy. A program that reads this was started by a runtime\n" +
		"that does not know of the volume: check the pod's runtimeClassName and, for Kata,\n" +
		"that disable_block_device_use is not true. Nothing can be written here.\n"
)
