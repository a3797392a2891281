package cluster

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"strings"
	"time"

	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/client-go/tools/clientcmd/api"

	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig"
)

// gateway is this machine's loopback for a machine in QEMU's network of users.
const gateway = "10.0.2.2"

// egress has the API server ask a proxy, which takes a socket, for connections to nodes.
const egress = `apiVersion: apiserver.k8s.io/v1beta1
kind: EgressSelectorConfiguration
egressSelections:
- name: cluster
  connection: {proxyProtocol: HTTPConnect, transport: {uds: {udsName: %q}}}
`

// Ports of this machine's loopback have to lead to kubelet and to the driver on a node that is elsewhere.
type Ports struct{ Kubelet, Driver string }

// Elsewhere starts a control plane with its controllers, for one test, whose node is a machine of QEMU's that this machine
// runs. There kubelet has to run with NodeAccess and with the authority's ca.crt in Dir, and the driver Native.
func Elsewhere(t rig.T) (*Kube, Ports) {
	t.Helper()
	rig.Need(t, "go")
	Patience = 10 * time.Minute // the node's processor may be emulated
	dir, free := t.TempDir(), freePorts(t, 2)
	ports := Ports{Kubelet: free[0], Driver: free[1]}
	forward(t, dir+"/egress.sock", ports.Kubelet, answerConnect)
	forward(t, dir+"/csi.sock", ports.Driver, nil)
	check.Must(t, os.WriteFile(dir+"/egress.yaml", fmt.Appendf(nil, egress, dir+"/egress.sock"), 0o600))
	c := &Cluster{Drivers: map[string]*Driver{Native: {Socket: dir + "/csi.sock"}}}
	c.ControlPlane = newControlPlane(t, dir, "--egress-selector-config-file="+dir+"/egress.yaml")
	c.Controllers, c.Scheduler = c.controllers()
	c.NodeAccess = c.farKubeconfig()
	t.Cleanup(func() {
		if t.Failed() {
			t.Log(c.Logs())
		}
		c.Scheduler.Kill()
		c.Controllers.Kill()
	})
	check.Must(t, c.ControlPlane.start())
	check.Must(t, errors.Join(c.Controllers.Launch(), c.Scheduler.Launch(), c.Apply(objects()), c.waitAccount()))
	return &Kube{Cluster: c, T: t}, ports
}

// farKubeconfig is the node's kubeconfig for use by the node: in one file, with the API server's address there.
func (c *ControlPlane) farKubeconfig() string {
	c.t.Helper()
	path := c.NodeKubeconfig(NodeName)
	config := check.Value(clientcmd.LoadFromFile(path))(c.t)
	check.Must(c.t, api.FlattenConfig(config))
	config.Clusters["test"].Server = strings.Replace(c.URL, "127.0.0.1", gateway, 1)
	check.Must(c.t, clientcmd.WriteToFile(*config, path))
	return path
}

// forward connects who connects to a socket with a port, after a greeting if there is one.
func forward(t rig.T, socket, port string, greet func(net.Conn) error) {
	t.Helper()
	listener := check.Value(net.Listen("unix", socket))(t)
	t.Cleanup(func() { _ = listener.Close() })
	go func() {
		for {
			from, err := listener.Accept()
			if err != nil {
				return
			}
			go func() {
				defer func() { _ = from.Close() }()
				if greet != nil && greet(from) != nil {
					return
				}
				to, err := net.Dial("tcp", "127.0.0.1:"+port)
				if err != nil {
					return
				}
				go func() { _, _ = io.Copy(to, from); _ = to.Close() }()
				_, _ = io.Copy(from, to)
			}()
		}
	}()
}

// answerConnect is what a proxy says to HTTP's CONNECT. The client sends nothing more before that.
func answerConnect(conn net.Conn) error {
	request, err := http.ReadRequest(bufio.NewReader(conn))
	if err == nil && request.Method != http.MethodConnect {
		err = errors.New(request.Method)
	}
	if err == nil {
		_, err = io.WriteString(conn, "HTTP/1.1 200 OK\r\n\r\n")
	}
	return err
}
