//go:build system

package cluster

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"github.com/crust-proxy/crust-proxy/test/rig"
)

// WantNothingLeft waits until nothing of pods and volumes is left, and says what
// is. Kubelet takes its time to tidy up.
func (c *Cluster) WantNothingLeft() error {
	return eventually("nothing of pods and volumes is left", func(context.Context) error {
		if left := c.Left(); len(left) > 0 {
			return errors.New(strings.Join(left, "; "))
		}
		return nil
	})
}

// Left lists what pods and volumes have on the node. It is empty where there are
// none.
func (c *Cluster) Left() []string {
	var left []string
	for what, pattern := range map[string]string{
		"pod":                    KubeletRoot + "/pods/*",
		"record of crust-proxy":  ProxyRunDir + "/state/*/*",
		"directory of a volume":  "/run/crust/*",
		"directory on its way":   handlerTemp + "/*",
		"private directory":      KubeletRoot + "/plugins/kubernetes.io/csi/crust-proxy.dev/*/*",
		"staging directory":      KubeletRoot + "/plugins/kubernetes.io/csi/*.example.com/*",
		"raw block of kubelet's": KubeletRoot + "/plugins/kubernetes.io/csi/volumeDevices/*/*",
	} {
		found, _ := filepath.Glob(pattern)
		for _, one := range found {
			if info, err := os.Stat(one); err == nil && (what != "record of crust-proxy" || info.Mode().IsRegular()) {
				left = append(left, what+" "+one)
			}
		}
	}
	for _, point := range rig.MountPoints(KubeletRoot) {
		left = append(left, "mount "+point)
	}
	for _, loop := range c.loops() {
		left = append(left, "loop device "+loop)
	}
	for _, pid := range inGroup(c.group) {
		command, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
		left = append(left, fmt.Sprintf("process %d %q", pid, bytes.ReplaceAll(command, []byte{0}, []byte{' '})))
	}
	return left
}

// loops lists the loop devices over images of this cluster's drivers.
func (c *Cluster) loops() []string { return slices.Collect(maps.Keys(rig.Loops(c.Dir + "/"))) }

// endProgram kills all processes of one program that lies in a directory of ours.
func endProgram(path string) {
	entries, _ := filepath.Glob("/proc/[0-9]*/exe")
	for _, exe := range entries {
		if program, err := os.Readlink(exe); err != nil || strings.TrimSuffix(program, " (deleted)") != path {
			continue
		}
		var pid int
		if _, err := fmt.Sscanf(exe, "/proc/%d/exe", &pid); err == nil {
			_ = syscall.Kill(pid, syscall.SIGKILL)
		}
	}
}
