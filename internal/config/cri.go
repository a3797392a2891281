package config

import "errors"

// CRI is the container runtime to ask for sandboxes in the way kubelet does, for
// CRI-O and whatever else is not containerd.
type CRI struct {
	// Socket is the runtime's; empty is off.
	Socket string `json:"socket"`
}

func (c CRI) validate(containerd Containerd) error {
	if c.Socket == "" {
		return nil
	}
	return errors.Join(
		absolute("cri.socket", c.Socket),
		fitsSocket("cri.socket", c.Socket),
		wrong(containerd.Socket != "", "cri.socket: a node's sandboxes are asked for in one place: "+
			"set containerd.socket to \"\" for CRI-O and others, or leave cri.socket empty for containerd"))
}
