package config

import "errors"

// CRI is a container runtime whose sandboxes are followed through the CRI: CRI-O, or another
// one that is not containerd.
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
