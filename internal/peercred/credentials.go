package peercred

import (
	"context"
	"fmt"
	"net"

	"google.golang.org/grpc/credentials"
)

const authType = "peercred"

// AuthInfo is what gRPC keeps of a connection.
type AuthInfo struct {
	credentials.CommonAuthInfo
	Peer Peer
}

// AuthType names the kind.
func (AuthInfo) AuthType() string { return authType }

type transport struct{}

// Credentials are gRPC transport credentials for unix sockets. They send
// nothing; they ask the kernel. Any other kind of connection is refused.
func Credentials() credentials.TransportCredentials { return transport{} }

// ServerHandshake asks who connected.
func (transport) ServerHandshake(conn net.Conn) (net.Conn, credentials.AuthInfo, error) {
	return identify(conn)
}

// ClientHandshake asks whose server it is.
func (transport) ClientHandshake(_ context.Context, _ string, conn net.Conn) (net.Conn, credentials.AuthInfo, error) {
	return identify(conn)
}

// Info describes the credentials.
func (transport) Info() credentials.ProtocolInfo {
	return credentials.ProtocolInfo{SecurityProtocol: authType}
}

// Clone gives the same: there is no state.
func (t transport) Clone() credentials.TransportCredentials { return t }

// OverrideServerName has no meaning here.
func (transport) OverrideServerName(string) error { return nil }

func identify(conn net.Conn) (net.Conn, credentials.AuthInfo, error) {
	local, ok := conn.(*net.UnixConn)
	if !ok {
		return nil, nil, fmt.Errorf("peer credentials need a unix socket, not %T", conn)
	}
	who, err := Of(local)
	if err != nil {
		return nil, nil, err
	}
	// The bytes never leave the kernel of this node.
	level := credentials.CommonAuthInfo{SecurityLevel: credentials.PrivacyAndIntegrity}
	return conn, AuthInfo{CommonAuthInfo: level, Peer: who}, nil
}
