//go:build system

package cluster

import (
	"context"
	"crypto/x509/pkix"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/crust-proxy/crust-proxy/test/rig"
)

// callTime ends every call to a process that hangs.
const callTime = 20 * time.Second

// ControlPlane is etcd and a kube-apiserver with Node and RBAC authorization and
// NodeRestriction. It needs no root, and no node.
type ControlPlane struct {
	// Dir holds everything of it.
	Dir string
	// URL is the API server's, Admin and AdminKubeconfig are the access of system:masters.
	URL             string
	Admin           *rest.Config
	AdminKubeconfig string
	Client          kubernetes.Interface

	Etcd, APIServer *Process

	programs  string
	authority *authority
}

// StartControlPlane starts a control plane that goes with the test. Nothing binds
// claims or makes service accounts there, and none is asked for.
func StartControlPlane(t testing.TB) *ControlPlane {
	t.Helper()
	dir, err := os.MkdirTemp("/tmp", rig.Prefix("kc"))
	if err != nil {
		t.Fatal(err)
	}
	rig.Need(t, "go")
	c, err := newControlPlane(dir, "--disable-admission-plugins=ServiceAccount")
	t.Cleanup(func() {
		c.close()
		if t.Failed() {
			t.Logf("log of the API server:\n%s", c.APIServer.Log())
		}
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	if err == nil {
		err = c.start()
	}
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// newControlPlane lays out a control plane.
func newControlPlane(dir string, flags ...string) (*ControlPlane, error) {
	c := &ControlPlane{Dir: dir, Etcd: &Process{}, APIServer: &Process{}}
	var err error
	if c.programs, err = Programs(); err != nil {
		return c, err
	}
	if c.authority, err = newAuthority(dir); err != nil {
		return c, err
	}
	ports, err := freePorts(3)
	if err != nil {
		return c, err
	}
	c.URL = "https://127.0.0.1:" + ports[0]
	if c.AdminKubeconfig, err = c.Kubeconfig("admin", "system:masters"); err != nil {
		return c, err
	}
	if c.Admin, err = restConfig(c.AdminKubeconfig); err != nil {
		return c, err
	}
	if c.Client, err = kubernetes.NewForConfig(c.Admin); err != nil {
		return c, err
	}
	c.Etcd = c.etcd("http://127.0.0.1:"+ports[1], "http://127.0.0.1:"+ports[2])
	c.APIServer, err = c.apiServer(ports[0], "http://127.0.0.1:"+ports[1], flags)
	return c, err
}

// OpenControlPlane starts a control plane for who is no test, in a directory of its
// own below dir. Close takes it away.
func OpenControlPlane(dir string) (*ControlPlane, error) {
	dir, err := os.MkdirTemp(dir, rig.Prefix("kc"))
	if err != nil {
		return nil, err
	}
	c, err := newControlPlane(dir, "--disable-admission-plugins=ServiceAccount")
	if err == nil {
		err = c.start()
	}
	if err != nil {
		return nil, errors.Join(err, c.Close())
	}
	return c, nil
}

// Close ends a control plane and removes all of it.
func (c *ControlPlane) Close() error {
	c.close()
	return os.RemoveAll(c.Dir)
}

func (c *ControlPlane) start() error {
	// The API server waits for etcd by itself.
	if err := errors.Join(c.Etcd.Launch(), c.APIServer.Start()); err != nil {
		return fmt.Errorf("%w\nlog of etcd:\n%s", err, c.Etcd.Log())
	}
	return nil
}

func (c *ControlPlane) close() {
	c.APIServer.Kill()
	c.Etcd.Kill()
}

// process is one of Kubernetes' programs.
func (c *ControlPlane) process(name string, args ...string) *Process {
	return &Process{Name: name, program: filepath.Join(c.programs, name), args: args, log: c.Dir + "/" + name + ".log"}
}

func (c *ControlPlane) etcd(client, peer string) *Process {
	return c.process("etcd", "--data-dir="+c.Dir+"/etcd", "--log-level=warn", "--unsafe-no-fsync",
		"--listen-client-urls="+client, "--advertise-client-urls="+client,
		"--listen-peer-urls="+peer, "--initial-advertise-peer-urls="+peer, "--initial-cluster=default="+peer)
}

// nodeAddress is what the cluster's only node has. Kubelet takes no address of the
// loopback.
const nodeAddress = "10.88.0.1"

func (c *ControlPlane) apiServer(port, etcd string, flags []string) (*Process, error) {
	address := net.IPv4(127, 0, 0, 1)
	serving, err := c.authority.issue("apiserver", pkix.Name{CommonName: "kube-apiserver"}, address)
	if err != nil {
		return nil, err
	}
	caller, err := c.authority.issue("apiserver-kubelet-client", pkix.Name{CommonName: "kube-apiserver", Organization: []string{"system:masters"}})
	if err != nil {
		return nil, err
	}
	// Tokens are signed with a key that its public half is read from, too.
	tokens, err := c.authority.issue("service-accounts", pkix.Name{CommonName: "service-accounts"})
	if err != nil {
		return nil, err
	}
	p := c.process("kube-apiserver", append([]string{
		"--etcd-servers=" + etcd, "--bind-address=" + address.String(), "--secure-port=" + port,
		"--advertise-address=" + nodeAddress, "--endpoint-reconciler-type=none", "--service-cluster-ip-range=10.96.0.0/16",
		"--tls-cert-file=" + serving, "--tls-private-key-file=" + serving, "--client-ca-file=" + c.authority.file(),
		"--kubelet-client-certificate=" + caller, "--kubelet-client-key=" + caller, "--kubelet-preferred-address-types=InternalIP",
		"--service-account-issuer=https://kubernetes.default.svc",
		"--service-account-key-file=" + tokens, "--service-account-signing-key-file=" + tokens,
		"--authorization-mode=Node,RBAC", "--enable-admission-plugins=NodeRestriction", "--allow-privileged=true",
		// Off by default before 1.36.
		"--feature-gates=MutatingAdmissionPolicy=true", "--runtime-config=admissionregistration.k8s.io/v1beta1=true",
	}, flags...)...)
	p.ready = c.readyz
	p.grace = 5 * time.Second // it waits a minute for requests that hang
	return p, nil
}

// readyz tells whether the API server serves, with the namespace that tests use.
func (c *ControlPlane) readyz() error {
	ctx, cancel := context.WithTimeout(context.Background(), callTime)
	defer cancel()
	if err := c.Client.CoreV1().RESTClient().Get().AbsPath("/readyz").Do(ctx).Error(); err != nil {
		return err
	}
	_, err := c.Client.CoreV1().Namespaces().Get(ctx, metav1.NamespaceDefault, metav1.GetOptions{})
	return err
}

// freePorts gives ports of the loopback that nobody had a moment ago.
func freePorts(count int) ([]string, error) {
	var ports []string
	for range count {
		listener, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			return nil, err
		}
		defer func() { _ = listener.Close() }()
		_, port, err := net.SplitHostPort(listener.Addr().String())
		if err != nil {
			return nil, err
		}
		ports = append(ports, port)
	}
	return ports, nil
}
