package cluster

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig"
	"github.com/crust-proxy/crust-proxy/test/rig/cri"
	"github.com/crust-proxy/crust-proxy/test/rig/vmnode"
)

// Cluster is a control plane with its controllers and one node.
type Cluster struct {
	*ControlPlane
	Controllers, Scheduler, Kubelet, Proxy *rig.Process
	// Containerd is the node's container runtime, with the handlers runc and crust.
	Containerd *cri.Node
	VM         *vmnode.Runtime // crust-vm, where pods can have machines
	// Drivers are by name.
	Drivers map[string]*Driver
	// NodeAccess is kubelet's kubeconfig.
	NodeAccess string

	mending   sync.Mutex
	sidecars  []*rig.Process // of one test
	crustRunc string
	logLevel  string // of what is ours
	group     string // parent control group of all pods
	settings  ProxySettings
}

// open starts a cluster of the programs given. It goes with the test.
func open(t rig.T, ours map[string]string, logLevel string) *Cluster {
	t.Helper()
	c := &Cluster{crustRunc: ours["crust-runc"], logLevel: logLevel, group: rig.Prefix("/crust-kube-")}
	c.ControlPlane = newControlPlane(t, rig.Tmpfs(t, "mode=0755"))
	t.Cleanup(func() {
		c.check(rig.KillGroup(c.group))
		rig.UnmountAll(t, KubeletRoot)
		c.check(rig.DetachLoops(c.Dir + "/")) // what tests that failed have left
	})
	check.Must(t, rig.MakeGroup(c.group))
	if ours["crust-vm"] != "" {
		c.VM = vmnode.Install(t, c.Dir, func(name string) string { return ours[name] })
	}
	c.Containerd = c.containerd()
	c.Controllers, c.Scheduler = c.controllers()
	c.Kubelet = c.kubelet()
	c.Proxy = c.proxy(ours["crust-proxy"])
	c.Drivers = make(map[string]*Driver)
	behind, direct := KubeletRoot+"/crust-proxy/registry", KubeletRoot+"/plugins_registry"
	for name, flags := range map[string][]string{Block: {behind}, Native: {behind, "--defer"}, Plain: {direct}} {
		c.Drivers[name] = c.newDriver(ours["crust-driver"], name, flags[0], flags[1:]...)
	}
	t.Cleanup(c.close)
	if err := c.start(); err != nil {
		t.Fatalf("%v\n%s", err, c.Logs())
	}
	return c
}

func (c *Cluster) check(err error) {
	check.That(c.t, err == nil, "%v", err)
}

func (c *Cluster) start() error {
	if err := c.ControlPlane.start(); err != nil {
		return err
	}
	starts := []error{c.Controllers.Launch(), c.Scheduler.Launch(), c.Apply(objects()), c.Proxy.Launch(), c.Kubelet.Launch()}
	for _, driver := range c.Drivers {
		starts = append(starts, driver.Process.Start(), driver.Registrar.Start())
	}
	starts = append(starts, c.Proxy.WaitReady(), c.Kubelet.WaitReady())
	if err := errors.Join(starts...); err != nil {
		return err
	}
	return errors.Join(c.WaitNode(corev1.ConditionTrue), c.waitDrivers(), c.waitAccount())
}

// WaitNode waits until the node's condition Ready is as given.
func (c *Cluster) WaitNode(want corev1.ConditionStatus) error {
	return eventually("the node is ready: "+string(want), func(ctx context.Context) error {
		node, err := c.Client.CoreV1().Nodes().Get(ctx, NodeName, metav1.GetOptions{})
		if err != nil {
			return err
		}
		for _, condition := range node.Status.Conditions {
			if condition.Type == corev1.NodeReady && condition.Status != want {
				return errors.New(condition.Message)
			}
		}
		return nil
	})
}

// waitAccount waits until pods can be made in the namespace of tests.
func (c *Cluster) waitAccount() error {
	return eventually("the default service account is there", func(ctx context.Context) error {
		_, err := c.Client.CoreV1().ServiceAccounts(metav1.NamespaceDefault).Get(ctx, "default", metav1.GetOptions{})
		return err
	})
}

// Components are all that can be taken away, by name.
func (c *Cluster) Components() map[string]*rig.Process {
	all := map[string]*rig.Process{"etcd": c.Etcd, "apiserver": c.APIServer, "controllers": c.Controllers, "scheduler": c.Scheduler}
	if c.elsewhere() {
		return all
	}
	all["kubelet"], all["containerd"], all["crust-proxy"] = c.Kubelet, c.Containerd.Process, c.Proxy
	for name, driver := range c.Drivers {
		all[name] = driver.Process
	}
	return all
}

// elsewhere tells whether the node is another machine.
func (c *Cluster) elsewhere() bool { return c.Kubelet == nil }

// Logs are the ends of all logs.
func (c *Cluster) Logs() string {
	var out strings.Builder
	for name, one := range c.Components() {
		fmt.Fprintf(&out, "log of %s:\n%s\n", name, rig.Tail(one.Log()))
	}
	return out.String()
}

// close ends everything but containerd, and says what was left although nobody had a volume any more.
func (c *Cluster) close() {
	if c.Kubelet.Alive() && c.APIServer.Alive() {
		_, err := c.Kubectl("delete", "pods", "--all", "--all-namespaces", "--grace-period=1", "--timeout="+Patience.String())
		c.check(errors.Join(err, c.WantNothingLeft(), c.Kubelet.Stop()))
	}
	for _, one := range []*rig.Process{c.Kubelet, c.Scheduler, c.Controllers, c.Proxy, c.APIServer, c.Etcd} {
		one.Kill()
	}
	for _, driver := range c.Drivers {
		driver.Process.Kill()
		c.check(driver.Registrar.Stop())
	}
	// The agent ends by itself some time after the last sandbox.
	agent := c.crustRunc + "-agent"
	c.check(rig.KillAll(func() []int {
		return rig.Processes(func(proc string) bool {
			program, err := os.Readlink(proc + "/exe")
			return err == nil && strings.TrimSuffix(program, " (deleted)") == agent
		})
	}))
}

// WantNothingLeft waits until nothing of pods and volumes is left, and says what is. Kubelet takes its time to tidy up.
func (c *Cluster) WantNothingLeft() error {
	return eventually("nothing of pods and volumes is left", func(context.Context) error {
		if left := c.Left(); len(left) > 0 {
			return fmt.Errorf("%s; refused last:\n%s", strings.Join(left, "; "), c.refusals())
		}
		return nil
	})
}

// refusals are the last calls that crust-proxy has refused, as its log has them.
func (c *Cluster) refusals() string {
	const most = 200_000
	var refused []string
	log := c.Proxy.Log()
	for line := range strings.Lines(log[max(0, len(log)-most):]) {
		if strings.Contains(line, `"msg":"call"`) && strings.Contains(line, `"error":`) {
			refused = append(refused, line)
		}
	}
	return strings.Join(refused[max(0, len(refused)-5):], "")
}

// Left lists what pods and volumes have on the node. It is empty where there are none.
func (c *Cluster) Left() []string {
	var left []string
	for what, pattern := range map[string]string{
		"pod":                   KubeletRoot + "/pods/*",
		"record of crust-proxy": ProxyRunDir + "/state/*/*",
		"directory of a volume": "/run/crust/*",
		"directory on its way":  handlerTemp + "/*/*",
		"staging directory":     KubeletRoot + "/plugins/kubernetes.io/csi/*.example.com/*",
		"raw block":             KubeletRoot + "/plugins/kubernetes.io/csi/volumeDevices/*/*",
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
	for loop := range rig.Loops(c.Dir + "/") { // over images of the drivers
		left = append(left, "loop device "+loop)
	}
	for _, pid := range rig.BelowGroup(c.group) {
		left = append(left, rig.DescribeProcess(pid))
	}
	return left
}
