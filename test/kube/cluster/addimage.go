//go:build system

package cluster

// AddImage gives the node an image, as a pull would.
func (c *Containerd) AddImage(name string, layer []byte, entrypoint []string) error {
	return c.node.AddImage(name, layer, entrypoint)
}
