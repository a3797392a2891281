//go:build system

package cluster

import (
	"bytes"
	"fmt"
	"os/exec"
	"path/filepath"
	"strings"
)

// Kubectl runs kubectl as admin and gives what it wrote; its words are in the error
// where it failed.
func (c *ControlPlane) Kubectl(args ...string) (string, error) { return c.kubectl("", args) }

// Apply applies manifests.
func (c *ControlPlane) Apply(yaml string) error {
	_, err := c.kubectl(yaml, []string{"apply", "-f", "-"})
	return err
}

func (c *ControlPlane) kubectl(input string, args []string) (string, error) {
	all := append([]string{"--kubeconfig=" + c.AdminKubeconfig, "--cache-dir=" + c.Dir + "/kubectl"}, args...)
	cmd := exec.Command(filepath.Join(c.programs, "kubectl"), all...)
	var out, complaints bytes.Buffer
	cmd.Stdin, cmd.Stdout, cmd.Stderr = strings.NewReader(input), &out, &complaints
	if err := cmd.Run(); err != nil {
		return out.String(), fmt.Errorf("kubectl %s: %w: %s", strings.Join(args, " "), err, complaints.String())
	}
	return out.String(), nil
}
