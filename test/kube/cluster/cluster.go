//go:build system

package cluster

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/crust-proxy/crust-proxy/reference/loopdev"
	"github.com/crust-proxy/crust-proxy/test/rig"
)

// Component is what can be taken away and put back.
type Component interface {
	Start() error
	Stop() error
	Kill()
	Restart() error
	Alive() bool
	Log() string
}

// Cluster is a control plane with its controllers and one node.
type Cluster struct {
	*ControlPlane
	Controllers, Kubelet, Proxy *Process
	Containerd                  *Containerd
	// Drivers are by name.
	Drivers map[string]*Driver
	// NodeAccess is kubelet's kubeconfig.
	NodeAccess string

	crustRunc string
	logLevel  string // of what is ours
	group     string // parent control group of all pods
	settings  ProxySettings
}

// newCluster starts a cluster. The programs of ours are built by the way. close
// must be called, also after an error.
func newCluster(t testing.TB) (*Cluster, error) {
	t.Helper()
	rig.Need(t, "go", "runc", "busybox", "ip", "mkfs.ext4", "mkfs.xfs", "blkid", "losetup")
	ours := map[string]string{}
	for _, name := range []string{"crust-proxy", "crust-driver", "crust-runc-agent", "crust-runc", "crustctl"} {
		ours[name] = rig.Program(t, name)
	}
	return open(ours, "debug")
}

// open starts a cluster of the programs given.
func open(ours map[string]string, logLevel string) (*Cluster, error) {
	dir, err := os.MkdirTemp("/tmp", rig.Prefix("kc"))
	if err != nil {
		return nil, err
	}
	c := &Cluster{crustRunc: ours["crust-runc"], logLevel: logLevel, group: "/crust-kube-" + filepath.Base(dir), Containerd: &Containerd{}}
	c.ControlPlane = &ControlPlane{Dir: dir}
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "mode=0755"); err != nil {
		return c, err
	}
	if c.ControlPlane, err = newControlPlane(dir); err != nil {
		return c, err
	}
	if err := c.layOut(ours); err != nil {
		return c, err
	}
	return c, c.start()
}

// layOut makes all components of the node; containerd runs already.
func (c *Cluster) layOut(ours map[string]string) error {
	var err error
	if err = makeGroup(c.group); err != nil {
		return err
	}
	if c.Containerd, err = newContainerd(c.crustRunc); err != nil {
		return err
	}
	if c.Controllers, err = c.controllers(); err != nil {
		return err
	}
	if c.Kubelet, err = c.kubelet(); err != nil {
		return err
	}
	if c.Proxy, err = c.proxy(ours["crust-proxy"]); err != nil {
		return err
	}
	c.Drivers = make(map[string]*Driver)
	behind, direct := KubeletRoot+"/crust-proxy/registry", KubeletRoot+"/plugins_registry"
	for name, flags := range map[string][]string{Block: {behind}, Native: {behind, "--defer"}, Plain: {direct}} {
		if c.Drivers[name], err = c.newDriver(ours["crust-driver"], name, flags[0], flags[1:]...); err != nil {
			return err
		}
	}
	return nil
}

// controllers is the kube-controller-manager.
func (c *Cluster) controllers() (*Process, error) {
	access, err := c.Kubeconfig("system:kube-controller-manager", "system:masters")
	return c.process("kube-controller-manager", "--kubeconfig="+access, "--leader-elect=false", "--secure-port=0",
		"--service-account-private-key-file="+c.Dir+"/service-accounts.pem", "--root-ca-file="+c.authority.file(),
		"--use-service-account-credentials=false", "--pvclaimbinder-sync-period=2s"), err
}

func (c *Cluster) start() error {
	if err := c.ControlPlane.start(); err != nil {
		return err
	}
	starts := []error{c.Controllers.Launch(), c.Apply(objects()), c.Proxy.Launch(), c.Kubelet.Launch()}
	for _, driver := range c.Drivers {
		starts = append(starts, driver.Start(), driver.Registrar.Start())
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
func (c *Cluster) Components() map[string]Component {
	all := map[string]Component{
		"etcd": c.Etcd, "apiserver": c.APIServer, "controllers": c.Controllers,
		"kubelet": c.Kubelet, "containerd": c.Containerd, "crust-proxy": c.Proxy,
	}
	for name, driver := range c.Drivers {
		all[name] = driver
	}
	return all
}

// processes are the components that were laid out.
func (c *Cluster) processes() []*Process {
	all := []*Process{c.Kubelet, c.Controllers, c.Proxy, c.APIServer, c.Etcd}
	return slices.DeleteFunc(all, func(one *Process) bool { return one == nil })
}

// Logs are the ends of all logs.
func (c *Cluster) Logs() string {
	var out strings.Builder
	for _, one := range c.processes() {
		fmt.Fprintf(&out, "log of %s:\n%s\n", one.Name, one.Log())
	}
	for name, driver := range c.Drivers {
		fmt.Fprintf(&out, "log of %s:\n%s\n", name, driver.Log())
	}
	fmt.Fprintf(&out, "log of containerd:\n%s\n", c.Containerd.Log())
	return out.String()
}

// close ends everything, says what was left although nobody had a volume any
// more, and takes it away.
func (c *Cluster) close() error {
	var problems []error
	if c.Kubelet != nil && c.Kubelet.Alive() && c.APIServer.Alive() {
		_, err := c.Kubectl("delete", "pods", "--all", "--all-namespaces", "--grace-period=1", "--timeout=60s")
		problems = append(problems, err, c.WantNothingLeft(), c.Kubelet.Stop())
	}
	for _, one := range c.processes() {
		one.Kill()
	}
	for _, driver := range c.Drivers {
		problems = append(problems, driver.close())
	}
	problems = append(problems, removeGroup(c.group))
	if c.Containerd.node != nil {
		// The agent ends by itself some time after the last sandbox.
		endProgram(c.crustRunc + "-agent")
		problems = append(problems, c.Containerd.node.Close())
	}
	problems = append(problems, rig.Unmount(KubeletRoot), c.detach(), rig.Unmount(c.Dir), os.RemoveAll(c.Dir))
	return errors.Join(problems...)
}

// detach takes away what tests that failed have left attached.
func (c *Cluster) detach() error {
	var problems []error
	for _, loop := range c.loops() {
		problems = append(problems, loopdev.Detach(loop))
	}
	return errors.Join(problems...)
}
